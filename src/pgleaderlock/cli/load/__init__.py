"""`pgleaderlock load`: `command` has the options, `engine` puts a server under load and checks it, `report` prints."""
