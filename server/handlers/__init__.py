"""What each route does with a request that has come to it; the table of routes is in server/routes.py."""
