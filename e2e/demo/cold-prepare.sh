# Runs in the root of the cold-start image: makes /src, a git repository of 500
# files or so with some history, as an image of a task has one.
export HOME=/root GIT_AUTHOR_NAME=quarry GIT_AUTHOR_EMAIL=quarry@example.org
export GIT_COMMITTER_NAME=quarry GIT_COMMITTER_EMAIL=quarry@example.org

git init --quiet --initial-branch=main /src
cd /src
# One commit for each folder that is added, an hour apart.
hour=0
for dir in asyncio collections concurrent ctypes distutils email encodings html http importlib json lib2to3 logging \
	multiprocessing pydoc_data re sqlite3 tkinter tomllib unittest urllib venv wsgiref xml xmlrpc zoneinfo; do
	[ -d "/usr/lib/python3.11/$dir" ] || continue
	cp -r "/usr/lib/python3.11/$dir" .
	find "$dir" -name __pycache__ -prune -exec rm -rf {} +
	# Every commit changes what earlier ones added too.
	for file in */__init__.py; do echo "# revision $hour" >>"$file"; done
	git add .
	hour=$((hour + 1))
	date="2024-01-$(printf %02d $((hour / 24 + 1)))T$(printf %02d $((hour % 24))):00:00Z"
	GIT_AUTHOR_DATE=$date GIT_COMMITTER_DATE=$date git commit --quiet -m "Add $dir"
done
git gc --quiet
git status --short
