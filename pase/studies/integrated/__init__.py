"""The communication of integrated model, batch and domain parallelism (Gholami et al. 2018; version 1: 2017)."""
