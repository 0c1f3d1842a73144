"""Mechanisms that the loop in train.py calls. No loop over steps lives here."""
