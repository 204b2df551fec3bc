"""Serving engines as they really run: started, asked, counted, compared with what was expected."""
