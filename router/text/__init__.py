"""Text to token ids and back: templates, tokenizer, stop strings. No torch."""
