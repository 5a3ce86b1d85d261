"""Reports as single HTML files: `page` has the building blocks, one file per report puts them together."""
