"""Families behind one interface, a folder each; the ViT layers, the decoder and weights for all of them."""
