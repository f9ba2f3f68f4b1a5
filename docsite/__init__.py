"""The documentation as a site: the pages of docs/, completed from the code that they describe."""
