"""Verification: which drafted tokens stay, and the token after them. Pure functions of tensors, no model inside."""
