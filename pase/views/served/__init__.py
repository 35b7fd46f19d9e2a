"""A page on this machine that plans again while its sliders are moved."""
