"""Finds images and videos in folders, lists, tars and URLs, and loads them."""
