"""A live web page that shows run folders, local or at a URL, without changing them."""
