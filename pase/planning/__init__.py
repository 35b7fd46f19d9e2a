"""From a graph and a machine to a plan, and the file that holds it."""
