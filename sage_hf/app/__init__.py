"""The application: command line, rendering and reports. The plug-in, which models call, does not import it."""
