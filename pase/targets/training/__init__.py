"""Parts of training programs common to all frameworks: data, initial weights, dropout masks, optimisers, options."""
