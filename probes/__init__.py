"""Looking at what attention does. Each file is one probe; record.py holds the record that they read."""
