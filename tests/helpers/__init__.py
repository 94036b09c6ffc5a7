"""Share helpers between the tests of several folders."""
