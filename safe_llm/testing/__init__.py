"""Shipped test doubles and conformance classes for backends and methods."""
