"""A discrete-event simulator of one training step of a placed plan on a machine."""
