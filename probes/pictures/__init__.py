"""Attention as pictures: PNG and SVG, the terminal, and the labels of tokens on both."""
