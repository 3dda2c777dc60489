"""How pages look: one style sheet, and the templates of everything that people read in a browser.

May use: nothing.
"""
