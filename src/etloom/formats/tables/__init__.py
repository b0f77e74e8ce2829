"""Builds and checks tables that several formats fill in the same way: nodes, tensors, communication."""
