"""Images: where they come from and how they are brought to the size that a network takes."""
