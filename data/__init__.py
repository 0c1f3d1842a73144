"""From any text to batches of token ids: sources, tokenizers, token shards on disk, and the loader."""
