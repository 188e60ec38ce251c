"""Measured speed: contenders that take turns on the same prompts in one process, with counts that no clock blurs."""
