"""What the documentation's site is made from besides docs/: the commands, the schemas, and links that leave docs/."""
