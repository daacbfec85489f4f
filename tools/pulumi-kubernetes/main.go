// The Kubernetes provider, built from its own Go module: the vendor's main embeds two files that its release job generates,
// so this one embeds the module's schema (put beside it, with its version set, by tools/build.py) and an empty mapping,
// which only `pulumi convert` reads.
package main

import (
	_ "embed"

	"github.com/pulumi/pulumi-kubernetes/provider/v4/pkg/provider"
	"github.com/pulumi/pulumi-kubernetes/provider/v4/pkg/version"
)

//go:embed schema.json
var schema []byte

func main() {
	provider.Serve("kubernetes", version.Version, schema, []byte("{}"))
}
