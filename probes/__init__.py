"""Looking at what attention does. record.py holds the record that most probes read; causal/ changes a run instead."""
