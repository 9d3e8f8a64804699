"""The composition root: config tree, Serve application, command line."""
