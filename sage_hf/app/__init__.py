"""The application: the command line, rendering, reports; what a model calls does not import it."""
