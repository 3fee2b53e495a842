"""Pure tensor maths: no process groups, no config, no logging. Tensors and numbers in, tensors out."""
