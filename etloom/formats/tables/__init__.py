"""Tables that several formats fill the same way: nodes, tensors, communication."""
