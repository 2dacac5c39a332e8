"""What is seen in a pass: from a forward and backward over the coming batch to `Statistics`."""
