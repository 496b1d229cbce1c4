"""Model families, a folder each, behind one interface; the decoder, ViT layers and weight loading that they share."""
