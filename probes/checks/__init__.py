"""Checks of one checkpoint: does the model in hand do what its configuration says?"""
