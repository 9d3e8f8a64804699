"""Methods that choose tokens several at a time: guesses for the next ones, and how many of them pay."""
