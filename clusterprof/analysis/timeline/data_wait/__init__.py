"""What a dataloader did while the training loop waited for its batch."""
