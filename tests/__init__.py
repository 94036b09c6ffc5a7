"""The tests, whose helpers are imported as a package."""
