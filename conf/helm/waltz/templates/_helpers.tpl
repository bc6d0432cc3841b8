{{/* The parts that the manifests share. A daemon is named by its kind: "server",
"storage" or "gateway". */}}

{{- define "waltz.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* What selects the pods of a kind; takes a list of the root and the kind. */}}
{{- define "waltz.selector" -}}
app.kubernetes.io/name: waltz
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "waltz.labels" -}}
{{ include "waltz.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end }}

{{/* The domain of a headless service: POD.DOMAIN is the address of a daemon. */}}
{{- define "waltz.domain" -}}
{{- $root := index . 0 -}}
{{ $root.Release.Name }}-{{ index . 1 }}.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}
{{- end }}

{{- define "waltz.zookeeper" -}}
{{ .Values.zookeeper.hosts }}{{ .Values.zookeeper.root }}
{{- if .Values.zookeeper.authSecretName }}?auth=/etc/waltz/zookeeper/zookeeper.auth{{ end }}
{{- end }}

{{/* The connect string of a pod: daemons and the commands in it use the same one. */}}
{{- define "waltz.connect" -}}
{{ include "waltz.zookeeper" . }}
{{- if .Values.tls.secretName }}
{{- ternary "&" "?" (not (empty .Values.zookeeper.authSecretName)) }}tls=/etc/waltz/settings/tls.toml
{{- end }}
{{- end }}

{{/* A map as TOML. Helm reads numbers as floats, so it would write 100000000 as 1e+08. */}}
{{- define "waltz.toml" -}}
{{- range $name, $value := . }}
{{ $name }} = {{ if kindIs "string" $value }}{{ $value | quote }}{{ else if kindIs "float64" $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- end }}
{{- end }}

{{- define "waltz.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "waltz.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* docs/operations.md, "Probes". */}}
{{- define "waltz.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: http}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /livez, port: http}
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: http}
  timeoutSeconds: 3
{{- end }}

{{/* The host of a daemon is the name of its pod in the headless service. */}}
{{- define "waltz.environment" -}}
{{- $root := index . 0 -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: WALTZ_{{ index . 1 | upper }}_ADVERTISED_HOST
  value: $(POD_NAME).{{ include "waltz.domain" . }}
- name: WALTZ_CONNECT
  value: {{ include "waltz.connect" $root | quote }}
{{- end }}

{{- define "waltz.mounts" -}}
- {name: settings, mountPath: /etc/waltz/settings, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /etc/waltz/tls, readOnly: true}
{{- end }}
{{- if .Values.zookeeper.authSecretName }}
- {name: zookeeper-auth, mountPath: /etc/waltz/zookeeper, readOnly: true}
{{- end }}
{{- end }}

{{- define "waltz.volumes" -}}
- name: settings
  configMap: {name: {{ .Release.Name }}-settings}
- name: tmp
  emptyDir: {}
{{- if .Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ .Values.tls.secretName }}, defaultMode: 0440}
{{- end }}
{{- if .Values.zookeeper.authSecretName }}
- name: zookeeper-auth
  secret: {secretName: {{ .Values.zookeeper.authSecretName }}, defaultMode: 0440}
{{- end }}
{{- end }}
