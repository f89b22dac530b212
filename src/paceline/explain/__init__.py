"""How an answer came about: every token's origin, every step's draft tree."""
