"""Cost and scaling of the EASGD family under the α-β model (You et al. 2017)."""
