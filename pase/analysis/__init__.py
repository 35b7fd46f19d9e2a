"""What a plan is set beside and why it is as it is: explanations, baselines, simulation."""
