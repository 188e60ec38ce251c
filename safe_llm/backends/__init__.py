"""Where next-token scores come from: the seam between the engine and the models."""
