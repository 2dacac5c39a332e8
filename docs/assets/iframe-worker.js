// Search in a site that is opened as a folder.  Browsers start no Worker from file:// pages, so the search's script runs in
// a hidden frame instead, with the two calls that it makes: addEventListener("message") and postMessage.
// The theme's offline plugin would load such a script from another host if mkdocs.yml did not name this one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html>"
      this.ready = new Promise((resolve, reject) => {
        frame.addEventListener("load", () => {
          const inner = frame.contentWindow
          inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
          const script = frame.contentDocument.createElement("script")
          script.onload = () => resolve(inner)
          script.onerror = () => reject(new Error(`${url} cannot be read`))
          script.src = url
          frame.contentDocument.head.append(script)
        }, {once: true})
      })
      document.body.append(frame)
    }

    postMessage(data) { // promises keep the order of messages
      this.ready.then(inner => inner.dispatchEvent(new inner.MessageEvent("message", {data})))
    }
  }
}
