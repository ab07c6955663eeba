"""Tables, tars and folders of images → a data set on disk."""
