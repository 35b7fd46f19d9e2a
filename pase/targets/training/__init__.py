"""What the training programs of every framework share: data, initial weights, masks, update rules, the command line."""
