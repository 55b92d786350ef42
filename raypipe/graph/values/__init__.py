"""What a graph alone says of the values of its tensors."""
