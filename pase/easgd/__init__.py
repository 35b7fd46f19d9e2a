"""Training across workers: replicas of a network that keep near one another (You, Buluç and Demmel 2017)."""
