"""Samovar's own model folder: `samovar.json`, shards of weights, tokenizer and template."""
