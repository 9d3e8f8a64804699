"""Grammars for answers: compiled and turned into sets of allowed tokens by llguidance."""
