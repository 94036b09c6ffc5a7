"""The application: command line, rendering and reports. The code that models call does not import it."""
