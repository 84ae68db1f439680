"""Published formats of quantised weights, computed here in plain torch to be measured next to our schemes."""
