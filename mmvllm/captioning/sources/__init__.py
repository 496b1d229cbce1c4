"""Where images and videos come from: folders, lists, tars, URLs; how they are loaded."""
