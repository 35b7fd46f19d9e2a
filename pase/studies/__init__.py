"""What draws the papers' own studies again: integrated parallelism, and EASGD's costs."""
